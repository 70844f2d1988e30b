// How a function of a WebAssembly build is exported: under a name of its own, to JavaScript alone.
#pragma once

#define WHET_EXPORT(name) extern "C" __attribute__((export_name(#name)))
