#define BG_LEVEL 4
#define BG_NAMESPACE level_amx
#define BG_NAME "amx"
#include "level.h"
