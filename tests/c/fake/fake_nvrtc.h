/* fake_nvrtc.h - how a test drives the NVRTC of libplfake.so, which compiles nothing.
 *
 * Its image is the text "fake cubin for --gpu-architecture=sm_90", or "fake PTX for
 * ...". Not for several threads.
 */
#ifndef FAKE_NVRTC_H
#define FAKE_NVRTC_H

#define FAKE_NVRTC_API __attribute__((visibility("default")))

/* Resets: every function works, the version is 12.4, and devices of capability 75 to
 * `newest` are known. */
FAKE_NVRTC_API void fake_nvrtc_reset(int newest);

/* Makes the function of this name return `result` from now on. */
FAKE_NVRTC_API void fake_nvrtc_fail(const char *name, int result);

FAKE_NVRTC_API void fake_nvrtc_set_version(int major, int minor);

/* Images made since the last reset. */
FAKE_NVRTC_API int fake_nvrtc_compiled(void);

/* Programs created and not destroyed. */
FAKE_NVRTC_API int fake_nvrtc_live(void);

#endif
