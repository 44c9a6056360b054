#include "lanes.h"
#ifdef __FLT16_MAX__
#define T _Float16
#define OF(name) name##_f16
#include "float_kernels.inc"
#endif
