#define PACELINE_KERNELS avx2
#include "compression/code_loops.h"
