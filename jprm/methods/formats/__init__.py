"""What other programs write and read: Hugging Face's folders, GGUF, PEFT, published PRMs, exports, chat templates."""
