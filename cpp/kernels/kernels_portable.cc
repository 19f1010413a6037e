#define PACELINE_ISA portable
#include "kernels/reduce_blocks.h"
