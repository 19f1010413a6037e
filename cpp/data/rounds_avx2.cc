#define PACELINE_ISA avx2
#include "data/round_loops.h"
