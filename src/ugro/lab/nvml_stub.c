/* A stub of libnvidia-ml.so for the lab and the tests: the GPUs are the lines of the file named by UGRO_PRETEND_GPUS.
 *
 *   uuid|name|memory_total|memory_used|use_percent|temperature|power_mw|power_limit_mw|error|pid:bytes,pid:bytes|throttle|
 *   energy_mj
 *
 * The file is read again at every call, so a GPU can be changed or lost while a program runs. A value of "-" is not
 * supported and "!CODE" fails with that NVML code; an error other than 0 is what opening the GPU gives. A process with
 * "-" bytes has unknown memory, and "pid:bytes:g" draws instead of computing. An energy of "*" grows with the machine's
 * uptime, as the power makes it. No file means that no driver is loaded; when it comes back the library has to be
 * initialised again, as after a driver was reloaded.
 *
 * UGRO_OLD_DRIVER leaves out the newer symbols; UGRO_WIDE_PROCESSES writes entries as some 535 drivers do.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, NOT_LOADED = 9 };

enum { UUID, NAME, MEMORY_TOTAL, MEMORY_USED, USE, TEMPERATURE, POWER, POWER_LIMIT, ERROR, PROCESSES, THROTTLE, ENERGY, FIELDS };

#define MAX_LINE 65536
#define NOT_AVAILABLE UINT64_MAX

typedef struct { uint64_t total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned pid; uint64_t used; } process_v1_t;
typedef struct { unsigned pid; uint64_t used; unsigned gpu_instance, compute_instance; } process_v2_t;
typedef struct { process_v2_t entry; uint64_t protected_memory; } process_wide_t;

static int is_initialized = 0;

static FILE *open_gpus(void)
{
    const char *path = getenv("UGRO_PRETEND_GPUS");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file == NULL)
        is_initialized = 0;
    return file;
}

/* Fills line with the GPU's line and returns 1; without one, returns 0 and how many there are. */
static int find_line(FILE *file, unsigned wanted, char *line, unsigned *count)
{
    *count = 0;
    while (fgets(line, MAX_LINE, file) != NULL) {
        line[strcspn(line, "\r\n")] = '\0';
        if (line[0] == '\0')
            continue;
        if ((*count)++ == wanted)
            return 1;
    }
    return 0;
}

static void split(char *line, const char *fields[FIELDS])
{
    for (int at = 0; at < FIELDS; at++) {
        fields[at] = line;
        line += strcspn(line, "|");
        if (*line == '|')
            *line++ = '\0';
    }
}

/* Handles are indexes from 1, so that none is a null pointer. */
static int read_gpu(const void *handle, char *line, const char *fields[FIELDS])
{
    unsigned count;
    if (!is_initialized)
        return UNINITIALIZED;
    FILE *file = open_gpus();
    if (file == NULL)
        return UNINITIALIZED;
    int is_found = find_line(file, (unsigned)((uintptr_t)handle - 1), line, &count);
    fclose(file);
    if (!is_found)
        return INVALID_ARGUMENT;
    split(line, fields);
    return atoi(fields[ERROR]);
}

static int parse_value(const char *text, uint64_t *value)
{
    if (text[0] == '-' || text[0] == '\0')
        return NOT_SUPPORTED;
    if (text[0] == '!')
        return atoi(text + 1);
    *value = strtoull(text, NULL, 10);
    return SUCCESS;
}

static int read_number(const void *handle, int field, uint64_t *value)
{
    char line[MAX_LINE];
    const char *fields[FIELDS];
    int code = read_gpu(handle, line, fields);
    return code != SUCCESS ? code : parse_value(fields[field], value);
}

static int read_unsigned(const void *handle, int field, unsigned *value)
{
    uint64_t number = 0;
    int code = read_number(handle, field, &number);
    *value = (unsigned)number;
    return code;
}

static int read_text(const void *handle, int field, char *text, unsigned length)
{
    char line[MAX_LINE];
    const char *fields[FIELDS];
    int code = read_gpu(handle, line, fields);
    if (code != SUCCESS)
        return code;
    if (strlen(fields[field]) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(text, fields[field]);
    return SUCCESS;
}

int nvmlInit_v2(void)
{
    FILE *file = open_gpus();
    if (file == NULL)
        return NOT_LOADED;
    fclose(file);
    is_initialized = 1;
    return SUCCESS;
}

int nvmlShutdown(void)
{
    int was_initialized = is_initialized;
    is_initialized = 0;
    return was_initialized ? SUCCESS : UNINITIALIZED;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    if (!is_initialized)
        return UNINITIALIZED;
    return snprintf(version, length, "pretend") >= (int)length ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    char line[MAX_LINE];
    if (!is_initialized)
        return UNINITIALIZED;
    FILE *file = open_gpus();
    if (file == NULL)
        return UNINITIALIZED;
    find_line(file, UINT32_MAX, line, count);
    fclose(file);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    char line[MAX_LINE];
    const char *fields[FIELDS];
    *handle = (void *)((uintptr_t)index + 1);
    return read_gpu(*handle, line, fields);
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length)
{
    return read_text(handle, UUID, uuid, length);
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length)
{
    return read_text(handle, NAME, name, length);
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory)
{
    int code = read_number(handle, MEMORY_TOTAL, &memory->total);
    if (code == SUCCESS)
        code = read_number(handle, MEMORY_USED, &memory->used);
    if (code == SUCCESS)
        memory->free = memory->total - memory->used;
    return code;
}

int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *utilization)
{
    utilization->memory = 0;
    return read_unsigned(handle, USE, &utilization->gpu);
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *temperature)
{
    return sensor != 0 ? INVALID_ARGUMENT : read_unsigned(handle, TEMPERATURE, temperature);
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts)
{
    return read_unsigned(handle, POWER, milliwatts);
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts)
{
    return read_unsigned(handle, POWER_LIMIT, milliwatts);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons)
{
    uint64_t number = 0;
    int code = read_number(handle, THROTTLE, &number);
    *reasons = number;
    return code;
}

#ifndef UGRO_OLD_DRIVER
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{
    char line[MAX_LINE];
    const char *fields[FIELDS];
    struct timespec now;
    uint64_t number = 0;
    int code = read_gpu(handle, line, fields);
    if (code == SUCCESS && fields[ENERGY][0] == '*') {
        code = parse_value(fields[POWER], &number);
        clock_gettime(CLOCK_MONOTONIC, &now);
        *millijoules = (unsigned long long)((double)number * ((double)now.tv_sec + (double)now.tv_nsec / 1e9));
        return code;
    }
    code = code != SUCCESS ? code : parse_value(fields[ENERGY], &number);
    *millijoules = number;
    return code;
}
#endif

static void put(void *entries, size_t size, unsigned at, unsigned pid, uint64_t used)
{
    process_wide_t wide;
    memset(&wide, 0, sizeof wide);
    wide.entry.pid = pid;
    wide.entry.used = used;
    if (size > sizeof(process_v1_t)) {
        wide.entry.gpu_instance = UINT32_MAX;
        wide.entry.compute_instance = UINT32_MAX;
    }
    memcpy((char *)entries + at * size, &wide, size);
}

/* Writes what fits and says how many there are. */
static int list_processes(const void *handle, int is_graphics, size_t size, unsigned *count, void *entries)
{
    char line[MAX_LINE];
    const char *fields[FIELDS];
    unsigned found = 0, room = *count;
    int code = read_gpu(handle, line, fields);
    if (code != SUCCESS)
        return code;
    if (fields[PROCESSES][0] == '-' || fields[PROCESSES][0] == '!')
        return parse_value(fields[PROCESSES], &(uint64_t){0});
    for (const char *item = fields[PROCESSES]; *item != '\0'; item += strcspn(item, ","), item += *item == ',') {
        char *end;
        unsigned pid = (unsigned)strtoul(item, &end, 10);
        const char *bytes = *end == ':' ? end + 1 : "-";
        const char *kind = bytes + strcspn(bytes, ":,");
        if ((strncmp(kind, ":g", 2) == 0) != is_graphics)
            continue;
        if (found < room)
            put(entries, size, found, pid, *bytes == '-' ? NOT_AVAILABLE : strtoull(bytes, NULL, 10));
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#ifdef UGRO_WIDE_PROCESSES
#define NEW_ENTRY sizeof(process_wide_t)
#else
#define NEW_ENTRY sizeof(process_v2_t)
#endif

#ifndef UGRO_OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *entries)
{
    return list_processes(handle, 0, NEW_ENTRY, count, entries);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, void *entries)
{
    return list_processes(handle, 1, NEW_ENTRY, count, entries);
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, void *entries)
{
    return list_processes(handle, 0, NEW_ENTRY, count, entries);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(void *handle, unsigned *count, void *entries)
{
    return list_processes(handle, 1, NEW_ENTRY, count, entries);
}
#endif

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *entries)
{
    return list_processes(handle, 0, sizeof(process_v1_t), count, entries);
}

int nvmlDeviceGetGraphicsRunningProcesses(void *handle, unsigned *count, void *entries)
{
    return list_processes(handle, 1, sizeof(process_v1_t), count, entries);
}
