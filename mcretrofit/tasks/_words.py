"""Plain common words for keys: a short list for tiny models, long ones for the RULER dialect."""

from __future__ import annotations

# one or two syllables each: a byte model of a million parameters must spell them
ADJECTIVES: tuple[str, ...] = tuple(
    """
    red blue green black white brown grey pink gold silver
    big small tall short long wide thin thick round flat
    old new hot cold warm cool wet dry soft hard
    dark light loud quiet fast slow clean dirty heavy sweet
    """.split()
)

NOUNS: tuple[str, ...] = tuple(
    """
    apple bird boat book box bread bridge car cat chair
    clock coat cup dog door drum fish flag flower garden
    hat horse house key knife lamp leaf map moon mouse
    plate ring river road ship shoe stone table tree wheel
    """.split()
)

LONG_ADJECTIVES: tuple[str, ...] = tuple(
    """
    able absent active actual alert alive ample ancient angry annual anxious apt artful ashen
    awake aware awful bare basic beige bitter bland blank bleak blind blond blunt bold bony bored
    bossy brainy brave breezy brief bright brisk broad broken bumpy burly busy calm candid careful
    careless central certain cheap cheerful chief chilly chubby civil classic clear clever cloudy
    clumsy coarse common complex constant cosy crafty creamy creepy crisp crooked crowded crude
    cruel curious curly curved daily damp dapper daring dear decent deep dense dim dizzy double
    dreary drowsy dull dusty eager early earnest easy elastic elder elegant empty endless entire
    equal even exact exotic expert extra faded faint fair faithful false famous fancy fatal feeble
    fertile fierce final fine firm fluffy foggy formal frail frank free frequent fresh friendly
    frosty frozen full funny fuzzy gaunt general gentle giant giddy glad gloomy glossy golden good
    graceful grand grateful grave greedy grim gritty grumpy guilty handy happy harsh hasty hazy
    healthy helpful hidden hollow honest huge humble hungry icy ideal idle jolly jumpy keen kind
    large late lazy lean legal level likely lively local lonely loose lost lovely loyal lucky mad
    magic main major mature mellow merry messy mild minor misty modern modest moist muddy narrow
    nasty native neat needy nervous nice nimble noble noisy normal novel numb oblong odd open oval
    painful pale patient perfect petty plain playful pleasant polite poor precise pretty prickly
    prime proper proud public puny pure quaint quick rapid rare raw ready real recent regal rich
    rigid ripe robust rotten rough royal rude rural rusty sad safe salty sandy scarce secret
    serious severe shabby shaky sharp shiny shy silent silky silly simple sincere sleepy slim
    slippery smart smooth snug social solid sour spare spicy spiky square stale steady steep stiff
    still stormy strange strict strong sturdy subtle sudden sunny super sure swift tame tart tasty
    tender tense tidy tight timid tiny tired total tough tricky true typical unique upbeat upper
    urban useful usual vague valid vast vital vivid weak wealthy weary weird wicked wild windy
    wise witty wooden woolly worthy young zany
    """.split()
)

LONG_NOUNS: tuple[str, ...] = tuple(
    """
    acorn actor airport album almond anchor ankle apron arch arena arrow artist atlas attic author
    autumn award axe badge bag baker balcony ball banana band bank banner barn barrel basin basket
    bath battery beach beacon bead beam bean bear beard beaver bed bee beetle bell belt bench
    berry bicycle blanket blossom board bone bonnet boot border bottle boulder bowl branch brass
    breeze brick brook broom brush bubble bucket bud bullet bundle bus bush butter button cabin
    cabinet cable cactus cage cake camel camera camp canal candle candy canoe canvas canyon cape
    captain card carpet carrot cart castle cattle cave cedar ceiling cellar chain chalk chapel
    cheese cherry chess chest chimney chin church cider circle circus city cliff cloth cloud
    clover coach coast cobra coconut coffee coin collar column comb comet compass copper coral
    cork corn corner cottage cotton couch cousin cradle crane crayon creek cricket crow crown
    crystal cube curtain cushion cyclist dagger daisy dance dancer desert desk diamond diary dice
    dinner doctor doll dolphin donkey dragon drawer dress driver duck eagle ear easel elbow
    elephant elm engine envelope eye fabric factory falcon farm farmer feather fence fern ferry
    field fiddle finger fire flame flute fog forest fork fossil fountain fox frog fruit furnace
    gallery garlic gate ghost giraffe glacier glass globe glove goat goose grape grass guitar
    hammer hand harbor harp hawk hedge helmet hen heron hill hive honey hook horn hotel
    igloo ink insect iron island ivory jacket jar jelly jewel judge jug jungle kettle king kitchen
    kite kitten ladder ladybird lake lantern lawyer leather lemon letter library lily lion lizard
    lobster lock lotus magnet maple marble market mask meadow medal melon mill mirror monkey
    mountain museum music nail napkin necklace needle nest net notebook nurse oak oasis ocean
    olive onion orange orchard otter oven owl paddle painter palace panda paper parrot path peach
    pear pearl pebble pencil pepper piano pigeon pillow pilot pine pirate planet plum pocket pond
    pony poppy pot potato prince pumpkin puppet puppy queen quilt rabbit radio rain raven ribbon
    rice robin rocket roof rope rose sailor salad salmon sand scarf school scissors seed shark
    shell shelf shield shirt shovel singer sister sky sled snail snow soap sofa soldier soup spider
    spoon squirrel stable star station statue storm stove straw street sugar summer sun swan
    sword teacher teapot temple tent theater thread throne thumb tiger toad tomato tower town
    train tulip tunnel turtle uncle valley vase velvet vest village vine violin wagon walnut water
    whale whistle willow window wing winter wolf wool yard zebra
    """.split()
)
