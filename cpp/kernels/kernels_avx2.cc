#define PACELINE_ISA avx2
#include "kernels/reduce_blocks.h"
