/* kernels_image.c - embeds files in the extension by the assembler.
 *
 *   PLI_KERNELS_FOLDER   the folder of the source, for the assembler; define it if the
 *                        compiler does not run in the project's root
 *   PLI_FATBIN_PATH      the fatbin from nvcc; not defined if there is no nvcc
 */
#include "kernels_image.h"

#include <stddef.h>

#ifndef PLI_KERNELS_FOLDER
#define PLI_KERNELS_FOLDER "csrc/backend"
#endif

/* Embeds the file and a zero behind it, as the array `name`. */
#define EMBED(name, path)                                                              \
    __asm__(".pushsection .rodata\n"                                                   \
            ".balign 64\n" #name ":\n"                                                 \
            ".incbin \"" path "\"\n"                                                   \
            ".byte 0\n"                                                                \
            ".popsection\n");                                                          \
    extern const char name[] __attribute__((visibility("hidden")))

/* NOLINTBEGIN(portability-no-assembler): C11 has no other way to embed a file */
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
