/* kernels_table.h - the parameters of the kernels in kernels.cu, passed by value.
 *
 * kernels.cu and kernels.c include it, so it must be valid C, CUDA C++ and NVRTC's C++,
 * and includes nothing.
 */
#ifndef PLI_KERNELS_TABLE_H
#define PLI_KERNELS_TABLE_H

/* The type of words in memory.  A complex number is two words. */
typedef enum pli_word {
    PLI_WORD_U8, /* integers wrap, so signed and unsigned add alike */
    PLI_WORD_U16,
    PLI_WORD_U32,
    PLI_WORD_U64,
    PLI_WORD_F16,
    PLI_WORD_BF16,
    PLI_WORD_F32,
    PLI_WORD_F64,
    PLI_N_WORDS
} pli_word;

enum {
    PLI_THREADS = 256,        /* per block */
    PLI_BLOCK_BYTES = 32768,  /* a block's share of a span, for kernels of bytes */
    PLI_BLOCK_WORDS = 8192,   /* ... and for kernels of words */
    PLI_PLACE_BYTES = 8,      /* size of a word that a checksum reads */
    PLI_SMALL_SPANS = 127,    /* 4,088 bytes of parameters: all drivers accept 4,096 */
    PLI_LARGE_SPANS = 1022,   /* 32,728 bytes: CUDA 12.1 accepts 32,764 */
    PLI_LARGE_VERSION = 12010 /* the first driver version with large parameters */
};

typedef struct pli_span {
    void *to;             /* checksum: the 64-bit sum */
    const void *from;     /* copy: NULL for zeros */
    unsigned long long n; /* add, scale: words; else bytes; never 0 */
    unsigned first_block; /* 0 for the first span; grows from span to span */
    /* add, scale: a pli_word; checksum: the span's offset in its segment, in units of
     * PLI_PLACE_BYTES; refresh: the number of its segment */
    unsigned detail;
} pli_span;

typedef struct pli_spans_head {
    unsigned n_spans;
    unsigned unused;
    union {
        double factor;                  /* scale */
        const unsigned long long *sums; /* refresh: of the present bytes, by segment */
    };
    union {
        double divisor;
        const unsigned long long *wanted_sums;
    };
} pli_spans_head;

typedef struct pli_small_spans {
    pli_spans_head head;
    pli_span spans[PLI_SMALL_SPANS];
} pli_small_spans;

typedef struct pli_large_spans {
    pli_spans_head head;
    pli_span spans[PLI_LARGE_SPANS];
} pli_large_spans;

typedef struct pli_sum_span {
    void *to;
    const void *from;
    unsigned long long stride_bytes;
    unsigned long long n;
    unsigned n_ranks;
    unsigned char word;
    unsigned char is_mean;
    unsigned char unused[2];
} pli_sum_span;

#endif
