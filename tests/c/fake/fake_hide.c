/* fake_hide.c - hides functions that this version of the libraries does not have.
 *
 * dlsym() searches the library's table of dynamic symbols, which is memory: a symbol
 * whose value is set to 0 is not found until the value is restored.
 */
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

typedef struct table {
    ElfW(Sym) * symbols;
    const char *names;
    size_t n;
} table;

static int find_table(table *out)
{
    struct link_map *map = NULL;
    Dl_info where;
    if (dladdr1(&fk, &where, (void **)&map, RTLD_DL_LINKMAP) == 0)
        return 0;
    *out = (table){0};
    for (const ElfW(Dyn) *it = map->l_ld; it->d_tag != DT_NULL; it++) {
        if (it->d_tag == DT_SYMTAB)
            out->symbols = (ElfW(Sym) *)it->d_un.d_ptr;
        if (it->d_tag == DT_STRTAB)
            out->names = (const char *)it->d_un.d_ptr;
        if (it->d_tag == DT_HASH)
            out->n = ((const uint32_t *)it->d_un.d_ptr)[1];
    }
    return out->symbols != NULL && out->names != NULL;
}

enum { MAX_HIDDEN = 64 };

static struct {
    ElfW(Sym) * symbol;
    ElfW(Addr) value;
} hidden[MAX_HIDDEN];
static int n_hidden;

static void set_value(ElfW(Sym) * symbol, ElfW(Addr) value)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *first = (char *)symbol - (uintptr_t)symbol % page;
    const size_t n_bytes = (size_t)((char *)(symbol + 1) - first);
    if (mprotect(first, n_bytes, PROT_READ | PROT_WRITE) != 0)
        return;
    symbol->st_value = value;
    (void)mprotect(first, n_bytes, PROT_READ);
}

/* Whether `name` is `of`, or its newest variant. */
static int is_variant(const char *name, const char *of)
{
    const size_t n = strlen(of);
    return strncmp(name, of, n) == 0 &&
           (name[n] == '\0' || strcmp(name + n, "_v2") == 0 ||
            strcmp(name + n, "WithFlags") == 0);
}

static void hide(const char *name, int has_variants)
{
    table it;
    if (!find_table(&it))
        return;
    for (size_t i = 0; i < it.n && n_hidden < MAX_HIDDEN; i++) {
        ElfW(Sym) *symbol = &it.symbols[i];
        const char *found = it.names + symbol->st_name;
        if (symbol->st_value == 0 ||
            !(has_variants ? is_variant(found, name) : strcmp(found, name) == 0))
            continue;
        hidden[n_hidden].symbol = symbol;
        hidden[n_hidden++].value = symbol->st_value;
        set_value(symbol, 0);
    }
}

void fk_hide_symbol(const char *name)
{
    hide(name, 1);
}

void fk_hide_newer(int driver, int nccl)
{
#define HIDE(name, since, arguments)                                                   \
    if ((since) > nccl)                                                                \
        hide(#name, 0);
    FAKE_NCCL_MAP(HIDE)
#undef HIDE
    if (driver < 12000)
        hide("cuGetProcAddress_v2", 0);
    if (driver < 11030)
        hide("cuGetProcAddress", 0);
}

void fk_unhide_all(void)
{
    while (n_hidden > 0) {
        n_hidden--;
        set_value(hidden[n_hidden].symbol, hidden[n_hidden].value);
    }
}
