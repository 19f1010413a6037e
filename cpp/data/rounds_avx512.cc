#define PACELINE_ROUNDS avx512
#include "data/round_loops.h"
