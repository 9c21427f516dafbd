"""The broker under what macOS and Windows lack, or do in another way."""
