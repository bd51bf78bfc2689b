#define BG_LEVEL 3
#define BG_NAMESPACE level_avx512_bf16
#define BG_NAME "avx512_bf16"
#include "level.h"
