"""Every RPC under random and mutated messages: nothing crashes, nothing answers INTERNAL, nothing leaks."""
