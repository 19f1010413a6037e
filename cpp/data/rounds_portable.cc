#define PACELINE_ISA portable
#include "data/round_loops.h"
