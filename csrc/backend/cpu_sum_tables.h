/* cpu_sum_tables.h - where cpu_sum.c finds what each instruction set compiled to. */
#ifndef PLI_CPU_SUM_TABLES_H
#define PLI_CPU_SUM_TABLES_H

#include "cpu_sum.h"

/* NULL in a build for another architecture.  A table being there says nothing of
 * the processor: pli_sum_table_of() asks that. */
const pli_sum_table *pli_sum_table_plain(void);
const pli_sum_table *pli_sum_table_neon(void);
const pli_sum_table *pli_sum_table_avx2(void);
const pli_sum_table *pli_sum_table_avx512(void);

#endif
