/* cpu_sum.c - names of the instruction sets, and which of them this processor has.
 *
 * Calls go through a table of function pointers: ifunc and target_clones need support
 * of the dynamic linker, which musl's lacks.
 */
#include "cpu_sum.h"

#include <string.h>

#include "core/status.h"

#if defined(__x86_64__)
#include <cpuid.h>

static int has_avx2(void)
{
    unsigned a;
    unsigned b;
    unsigned c;
    unsigned d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2"))
        return 0;
    /* Some supported compilers reject "f16c" in __builtin_cpu_supports.  The answer for
     * avx2 includes that the system saves the registers. */
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

static int has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

const char *pli_isa_text(pli_isa isa)
{
#define ISA_TEXT(name, text) [name] = (text),
    static const char *const texts[PLI_N_ISAS] = {PLI_ISA_MAP(ISA_TEXT)};
#undef ISA_TEXT
    return (unsigned)isa < PLI_N_ISAS ? texts[isa] : "unknown";
}

pl_status pli_isa_parse(const char *text, pli_isa *out)
{
    pl_status st = PL_OK;
    for (int i = 0; i < PLI_N_ISAS; i++) {
        if (strcmp(text, pli_isa_text((pli_isa)i)) == 0) {
            *out = (pli_isa)i;
            goto done;
        }
    }
#define ISA_WORD(name, text) " " text
    PL_FAIL(PL_EINVAL, "unknown instruction set '%s'; the allowed words are:%s", text,
            PLI_ISA_MAP(ISA_WORD));
#undef ISA_WORD
done:
    return st;
}

const pli_sum_table *pli_sum_table_of(pli_isa isa)
{
    switch (isa) {
    case PLI_ISA_PLAIN:
        return pli_sum_table_plain();
#if defined(__aarch64__)
    case PLI_ISA_NEON:
        return pli_sum_table_neon();
#elif defined(__x86_64__)
    case PLI_ISA_AVX2:
        return has_avx2() ? pli_sum_table_avx2() : NULL;
    case PLI_ISA_AVX512:
        return has_avx512() ? pli_sum_table_avx512() : NULL;
#endif
    default:
        return NULL;
    }
}

const pli_sum_table *pli_sum_table_best(void)
{
    const pli_sum_table *best = pli_sum_table_of(PLI_ISA_PLAIN);
    for (int i = PLI_ISA_PLAIN + 1; i < PLI_N_ISAS; i++) {
        const pli_sum_table *table = pli_sum_table_of((pli_isa)i);
        if (table != NULL)
            best = table;
    }
    return best;
}
