/* activity.h - what a rank is doing: its peers name it in messages, and `paceline top`
 * shows it. */
#ifndef PLI_ACTIVITY_H
#define PLI_ACTIVITY_H

#define PLI_ACTIVITY_MAP(X)                                                            \
    X(PL_CONSTRUCTING, "construction")                                                 \
    X(PL_IDLE, "the user's code")                                                      \
    X(PL_FORWARD, "forward")                                                           \
    X(PL_BACKWARD, "backward")                                                         \
    X(PL_FINISHING, "the end of backward")                                             \
    X(PL_JOINED, "a join, out of batches")

typedef enum pl_activity {
#define PLI_ACTIVITY_ENUM(name, text) name,
    PLI_ACTIVITY_MAP(PLI_ACTIVITY_ENUM)
#undef PLI_ACTIVITY_ENUM
        PL_N_ACTIVITIES
} pl_activity;

#endif
