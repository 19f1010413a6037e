#define PACELINE_KERNELS portable
#include "kernels/reduce_blocks.h"
