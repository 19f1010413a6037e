#define PACELINE_ISA avx2
#include "compression/code_loops.h"
