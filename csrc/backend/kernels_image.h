/* kernels_image.h - the kernels inside the extension: a fatbin, unless it was built
 * without nvcc, and the text of their source, for NVRTC.
 */
#ifndef PLI_KERNELS_IMAGE_H
#define PLI_KERNELS_IMAGE_H

/* Static; NULL in a build without nvcc. */
const void *pli_kernels_fatbin(void);

/* A header's name in #include, and its text; the last entry is the source file. */
typedef struct pli_kernels_text {
    const char *name;
    const char *text;
} pli_kernels_text;

enum { PLI_KERNELS_N_TEXTS = 3 };

void pli_kernels_texts(pli_kernels_text out[PLI_KERNELS_N_TEXTS]);

#endif
