/* kernels_table.h - what a launch of kernels.cu is given, by value.
 *
 * Read by the kernels and by kernels.c, so it is C, CUDA C++ and NVRTC's C++ at once,
 * and includes nothing.
 */
#ifndef PLI_KERNELS_TABLE_H
#define PLI_KERNELS_TABLE_H

/* What stands in memory.  Complex numbers are two of their parts. */
typedef enum pli_word {
    PLI_WORD_U8, /* integers wrap: signed or not is the same */
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
    PLI_THREADS = 256,        /* of a block */
    PLI_BLOCK_BYTES = 32768,  /* its share of a span, where that counts bytes */
    PLI_BLOCK_WORDS = 8192,   /* and where it counts words */
    PLI_PLACE_BYTES = 8,      /* a word of a checksum */
    PLI_SMALL_SPANS = 127,    /* 4,088 bytes of parameters: all drivers take 4,096 */
    PLI_LARGE_SPANS = 1022,   /* 32,728: CUDA 12.1 takes 32,764 */
    PLI_LARGE_VERSION = 12010 /* of the driver */
};

typedef struct pli_span {
    void *to;             /* checksum: a sum of 64 bits */
    const void *from;     /* copy: NULL for zeros */
    unsigned long long n; /* words for add and scale, else bytes; never 0 */
    unsigned first_block; /* rises from span to span, from 0 */
    /* add, scale: what the words are; checksum: how far into its segment the span is,
     * by PLI_PLACE_BYTES; refresh: the number of its segment */
    unsigned detail;
} pli_span;

typedef struct pli_spans_head {
    unsigned n_spans;
    unsigned unused;
    union {
        double factor;                  /* scale */
        const unsigned long long *sums; /* refresh: of what is there, by segment */
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
