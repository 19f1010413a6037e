#define PACELINE_ISA neon
#include "compression/code_loops.h"
