#define BG_LEVEL 2
#define BG_NAMESPACE level_avx512
#define BG_NAME "avx512"
#include "level.h"
