#define T float
#define OF(name) name##_f32
#include "float_kernels.inc"
