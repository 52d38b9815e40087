// SPDX-License-Identifier: GPL-2.0
/*
 * Prints types and prototypes of a kernel from its BTF, in a form to compare: usage: btf VMLINUX NAME...
 * VMLINUX is an ELF file with a section .BTF, or BTF alone, as in /sys/kernel/btf. Every structure, enumeration and function of
 * a name is printed. Structures without names are printed where they are used, others by name and size.
 */
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/btf.h>

static const struct btf_type **types;
static unsigned int nr_types;
static const char *strings;
static uint32_t strings_len;

static void fail(const char *why)
{
	fprintf(stderr, "btf: %s\n", why);
	exit(2);
}

static const struct btf_type *type(uint32_t id)
{
	if (id >= nr_types)
		fail("a type is not there");
	return types[id];
}

static const char *name(uint32_t offset)
{
	if (offset >= strings_len)
		fail("a name is not there");
	return strings + offset;
}

static size_t extra(const struct btf_type *t)
{
	unsigned int n = BTF_INFO_VLEN(t->info);

	switch (BTF_INFO_KIND(t->info)) {
	case BTF_KIND_INT:
	case BTF_KIND_VAR:
	case BTF_KIND_DECL_TAG:
		return 4;
	case BTF_KIND_ARRAY:
		return sizeof(struct btf_array);
	case BTF_KIND_STRUCT:
	case BTF_KIND_UNION:
		return n * sizeof(struct btf_member);
	case BTF_KIND_ENUM:
	case BTF_KIND_FUNC_PROTO:
		return n * 8;
	case BTF_KIND_DATASEC:
	case BTF_KIND_ENUM64:
		return n * 12;
	default:
		return 0;
	}
}

static void load(char *file, size_t len)
{
	const struct btf_header *h;
	const char *at, *end;
	size_t room = 0;

	if (len > sizeof(Elf64_Ehdr) && !memcmp(file, ELFMAG, SELFMAG)) {
		Elf64_Ehdr *e = (void *)file;
		Elf64_Shdr *s = (void *)(file + e->e_shoff), *found = NULL;

		if (e->e_shoff + (size_t)e->e_shnum * sizeof(*s) > len || e->e_shstrndx >= e->e_shnum)
			fail("not a whole ELF file");
		for (int i = 0; i < e->e_shnum; i++)
			if (!strcmp(file + s[e->e_shstrndx].sh_offset + s[i].sh_name, ".BTF"))
				found = &s[i];
		if (!found || found->sh_offset + found->sh_size > len)
			fail("there is no BTF");
		len = found->sh_size;
		file += found->sh_offset;
	}
	h = (void *)file;
	if (len < sizeof(*h) || h->magic != BTF_MAGIC || h->version != BTF_VERSION ||
	    (size_t)h->hdr_len + h->type_off + h->type_len > len || (size_t)h->hdr_len + h->str_off + h->str_len > len)
		fail("there is no BTF that I know");
	strings = file + h->hdr_len + h->str_off;
	strings_len = h->str_len;
	at = file + h->hdr_len + h->type_off;
	end = at + h->type_len;
	for (nr_types = 1; at + sizeof(struct btf_type) <= end; nr_types++) {
		if (nr_types >= room) {
			room = room ? 2 * room : 65536;
			types = realloc(types, room * sizeof(*types));
			if (!types)
				fail("out of memory");
			types[0] = &(const struct btf_type){ 0 };
		}
		types[nr_types] = (const void *)at;
		at += sizeof(struct btf_type) + extra(types[nr_types]);
	}
}

static void print_members(const struct btf_type *t, int depth);
static void print_parameters(const struct btf_type *t);

static void print_type(uint32_t id, int depth);

/* What is pointed to matters by name only: its layout is in the same headers that the module is built with */
static void print_target(uint32_t id, int depth)
{
	const struct btf_type *t = type(id);
	int kind = BTF_INFO_KIND(t->info);

	if ((kind == BTF_KIND_STRUCT || kind == BTF_KIND_UNION || kind == BTF_KIND_FWD) && *name(t->name_off))
		printf("%s", name(t->name_off));
	else
		print_type(id, depth);
}

static void print_type(uint32_t id, int depth)
{
	const struct btf_type *t = type(id);
	const char *own = name(t->name_off);
	const struct btf_array *array;

	if (!id) {
		printf("void");
		return;
	}
	switch (BTF_INFO_KIND(t->info)) {
	case BTF_KIND_PTR:
		printf("*");
		print_target(t->type, depth);
		break;
	case BTF_KIND_CONST:
		printf("const ");
		print_target(t->type, depth);
		break;
	case BTF_KIND_TYPEDEF:
	case BTF_KIND_VOLATILE:
	case BTF_KIND_RESTRICT:
	case BTF_KIND_TYPE_TAG:
		print_type(t->type, depth);
		break;
	case BTF_KIND_ARRAY:
		array = (const void *)(t + 1);
		printf("[%u]", array->nelems);
		print_type(array->type, depth);
		break;
	case BTF_KIND_FUNC_PROTO:
		print_type(t->type, depth);
		print_parameters(t);
		break;
	case BTF_KIND_STRUCT:
	case BTF_KIND_UNION:
		printf("%s ", BTF_INFO_KIND(t->info) == BTF_KIND_UNION ? "union" : "struct");
		if (*own)
			printf("%s of %u", own, t->size);
		else
			print_members(t, depth);
		break;
	case BTF_KIND_INT:
		printf("%s:%x", own, *(const uint32_t *)(t + 1));
		break;
	default: /* enumerations */
		printf("%s", own);
	}
}

static void print_parameters(const struct btf_type *t)
{
	const struct btf_param *p = (const void *)(t + 1);

	printf("(");
	for (unsigned int i = 0; i < BTF_INFO_VLEN(t->info); i++) {
		printf(i ? ", " : "");
		print_type(p[i].type, 0);
	}
	printf(")");
}

static void print_members(const struct btf_type *t, int depth)
{
	const struct btf_member *m = (const void *)(t + 1);

	printf("of %u {\n", t->size);
	for (unsigned int i = 0; i < BTF_INFO_VLEN(t->info); i++) {
		printf("%*s%s at %x: ", depth * 2 + 2, "", name(m[i].name_off), m[i].offset);
		print_type(m[i].type, depth + 1);
		printf("\n");
	}
	printf("%*s}", depth * 2, "");
}

int main(int argc, char **argv)
{
	FILE *f = argc > 1 ? fopen(argv[1], "rb") : NULL;
	size_t len = 0, room = 1 << 24;
	char *file = malloc(room);

	if (!f || !file)
		fail("usage: btf VMLINUX NAME...; VMLINUX must be readable");
	while ((len += fread(file + len, 1, room - len, f)) == room) {
		file = realloc(file, room *= 2);
		if (!file)
			fail("out of memory");
	}
	load(file, len);
	for (int i = 2; i < argc; i++) {
		int found = 0;

		for (uint32_t id = 1; id < nr_types; id++) {
			const struct btf_type *t = types[id];
			int kind = BTF_INFO_KIND(t->info);

			if (strcmp(name(t->name_off), argv[i]))
				continue;
			if (kind == BTF_KIND_STRUCT || kind == BTF_KIND_UNION) {
				printf("%s ", argv[i]);
				print_members(t, 0);
			} else if (kind == BTF_KIND_FUNC) {
				printf("%s: ", argv[i]);
				print_type(t->type, 0);
			} else if (kind == BTF_KIND_ENUM) {
				const struct btf_enum *e = (const void *)(t + 1);

				printf("%s:", argv[i]);
				for (unsigned int k = 0; k < BTF_INFO_VLEN(t->info); k++)
					printf(" %s=%d", name(e[k].name_off), e[k].val);
			} else {
				continue;
			}
			printf("\n");
			found = 1;
		}
		if (!found)
			printf("%s: none\n", argv[i]);
	}
	return 0;
}
