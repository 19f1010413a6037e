#define PACELINE_ISA avx512
#include "kernels/reduce_blocks.h"
