#define PACELINE_KERNELS avx512
#include "kernels/reduce_blocks.h"
