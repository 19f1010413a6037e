#define PACELINE_KERNELS avx2
#include "kernels/reduce_blocks.h"
