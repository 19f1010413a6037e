#define PACELINE_ROUNDS avx2
#include "data/round_loops.h"
