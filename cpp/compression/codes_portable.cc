#define PACELINE_ISA portable
#include "compression/code_loops.h"
