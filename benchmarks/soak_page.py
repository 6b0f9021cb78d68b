def make_page(found):
    return "x"
