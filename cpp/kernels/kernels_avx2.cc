#define PACELINE_ISA avx2
#include "kernels/reduce_stretches.h"
