/* cpu_sum_tables.h - the tables that cpu_sum.c chooses from. */
#ifndef PLI_CPU_SUM_TABLES_H
#define PLI_CPU_SUM_TABLES_H

#include "cpu_sum.h"

/* Defined in builds for their architecture.  The processor may still lack the
 * instructions: pli_sum_table_of() checks that. */
const pli_sum_table *pli_sum_table_plain(void);
const pli_sum_table *pli_sum_table_neon(void);
const pli_sum_table *pli_sum_table_avx2(void);
const pli_sum_table *pli_sum_table_avx512(void);

#endif
