"""How machine code comes to be: IR builder, tile ISAs, compiler, object cache. Knows nothing of experts."""
