/* kernels_image.c - files, put into the extension by the assembler.
 *
 *   PLI_KERNELS_FOLDER   where the source is, for the assembler; csrc/backend unless
 *                        the compiler runs elsewhere than in the project's own folder
 *   PLI_FATBIN_PATH      what nvcc made of it; not defined where there is no nvcc
 */
#include "kernels_image.h"

#include <stddef.h>

#ifndef PLI_KERNELS_FOLDER
#define PLI_KERNELS_FOLDER "csrc/backend"
#endif

/* The file, and a zero behind it. */
#define EMBED(name, path)                                                              \
    __asm__(".pushsection .rodata\n"                                                   \
            ".balign 64\n" #name ":\n"                                                 \
            ".incbin \"" path "\"\n"                                                   \
            ".byte 0\n"                                                                \
            ".popsection\n");                                                          \
    extern const char name[] __attribute__((visibility("hidden")))

/* NOLINTBEGIN(portability-no-assembler): C has no other way to take a file in */
EMBED(pli_text_table, PLI_KERNELS_FOLDER "/kernels_table.h");
EMBED(pli_text_words, PLI_KERNELS_FOLDER "/kernels_words.h");
EMBED(pli_text_kernels, PLI_KERNELS_FOLDER "/kernels.cu");
#ifdef PLI_FATBIN_PATH
EMBED(pli_fatbin, PLI_FATBIN_PATH);
#endif
/* NOLINTEND(portability-no-assembler) */

const void *pli_kernels_fatbin(void)
{
#ifdef PLI_FATBIN_PATH
    return pli_fatbin;
#else
    return NULL;
#endif
}

void pli_kernels_texts(pli_kernels_text out[PLI_KERNELS_N_TEXTS])
{
    out[0] = (pli_kernels_text){"kernels_table.h", pli_text_table};
    out[1] = (pli_kernels_text){"kernels_words.h", pli_text_words};
    out[2] = (pli_kernels_text){"kernels.cu", pli_text_kernels};
}
