#define PICCARD_ISA kAvx2Isa
#define PICCARD_ISA_NAME "avx2"
#define PICCARD_LANES 8
#include "isa_loops.inl"
