#define PACELINE_ISA neon
#include "kernels/reduce_blocks.h"
