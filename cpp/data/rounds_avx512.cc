#define PACELINE_ISA avx512
#include "data/round_loops.h"
