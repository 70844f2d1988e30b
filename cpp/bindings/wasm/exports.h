// Exports a function of a WebAssembly build to JavaScript under its own name.
#pragma once

#define WHET_EXPORT(name) extern "C" __attribute__((export_name(#name)))
