/* kernels_image.h - the kernels as they lie in the extension: a fatbin, which is empty
 * in a build without nvcc, and the text of their source, for NVRTC.
 */
#ifndef PLI_KERNELS_IMAGE_H
#define PLI_KERNELS_IMAGE_H

/* Static; NULL where there is none. */
const void *pli_kernels_fatbin(void);

/* name that the source includes it by, then its text; the last one is the source */
typedef struct pli_kernels_text {
    const char *name;
    const char *text;
} pli_kernels_text;

enum { PLI_KERNELS_N_TEXTS = 3 };

void pli_kernels_texts(pli_kernels_text out[PLI_KERNELS_N_TEXTS]);

#endif
