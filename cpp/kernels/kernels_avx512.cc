#define PACELINE_ISA avx512
#include "kernels/reduce_stretches.h"
