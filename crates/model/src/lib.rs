//! Architectures as data: configuration to plan; attention, router, experts; key-value cache; tokenizer and chat template.
