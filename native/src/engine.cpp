extern "C" __attribute__((visibility("default"))) int slipstream_engine_abi() { return 1; }
