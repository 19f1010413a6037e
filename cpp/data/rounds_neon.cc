#define PACELINE_ISA neon
#include "data/round_loops.h"
