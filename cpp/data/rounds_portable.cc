#define PACELINE_ROUNDS portable
#include "data/round_loops.h"
