#define PACELINE_KERNELS portable
#include "compression/code_loops.h"
