#define PACELINE_KERNELS avx512
#include "compression/code_loops.h"
