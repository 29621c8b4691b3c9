def test_probe(kit, tree_digest):
    kit.image("a.png")
    parts = kit.convert([{"id":"x","content":[{"type":"image","image":"a.png"}],"k":1.50}], kit.source())
    print(parts, kit.records(parts), tree_digest(kit.folder))
