#define PACELINE_ISA portable
#include "kernels/reduce_stretches.h"
