#define PACELINE_ISA avx512
#include "compression/code_loops.h"
