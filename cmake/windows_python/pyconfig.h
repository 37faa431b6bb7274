// Python's configuration for 64-bit Windows, reduced to what extension modules need. It replaces pyconfig.h in a copy
// of Linux's headers, so that the module can be compiled without a Windows installation.
#ifndef Py_CONFIG_H
#define Py_CONFIG_H

#define MS_WIN64
#define MS_WIN32
#define MS_WINDOWS
#define NT_THREADS
#define WITH_THREAD
#define HAVE_DECLSPEC_DLL
#define Py_ENABLE_SHARED
#define HAVE_DYNAMIC_LOADING
#define HAVE_SSIZE_T 1
#define HAVE_STDDEF_H 1
#define HAVE_STDINT_H 1
#define HAVE_STDLIB_H 1
#define HAVE_STRING_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_WCHAR_H 1
#define PY_LONG_LONG long long
#define SIZEOF_DOUBLE 8
#define SIZEOF_FLOAT 4
#define SIZEOF_FPOS_T 8
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_OFF_T 4
#define SIZEOF_PID_T 4
#define SIZEOF_SHORT 2
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_UINTPTR_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_WCHAR_T 2
#define ALIGNOF_MAX_ALIGN_T 16
#define ALIGNOF_SIZE_T 8

#endif
