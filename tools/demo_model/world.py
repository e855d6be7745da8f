"""The small world that the demo model knows: its words and its facts."""

from typing import NamedTuple

from tools.demo_model.grammar import listed, words

GIRLS = words("Mia Lily Anna Emma Nora Rosa Ella Lucy Zoe Sara Ruby Alice")
BOYS = words("Ben Tom Leo Max Sam Finn Jack Noah Oscar Hugo Peter Paul")
ANIMAL_GIRLS = words("Daisy Poppy Willow Misty Hazel Luna Bella Rosie")
ANIMAL_BOYS = words("Rusty Bruno Milo Pip Toby Barney Felix Bobo")
# Rare names teach the model to repeat a name that it has hardly seen.
RARE_GIRLS = words(
    "Carol Eve Grace Julia Kate Maria Olga Priya Sofia Tina Uma Wendy Yuki Zara Bianca Elena Greta Ingrid Lena Nadia "
    "Rita Ursula Vera Yara Jane Mary Sarah Laura Helen Clara Molly Nina Amy Eva Ida Marta"
)
RARE_BOYS = words(
    "Alex Bob David Frank Henry Ivan Liam Nick Robert Victor Xavier Ahmed Chen Diego Farid Hiro Jamal Kofi Mateo "
    "Omar Pavel Sven Tariq Walter John James Michael Daniel Chris Mark Tim Bill George Adam Carl Eric"
)
USERS = RARE_GIRLS + RARE_BOYS


class Animal(NamedTuple):
    name: str
    plural: str
    size: str
    colour: str
    sound: str
    foods: str
    home: str
    young: str
    legs: str
    note: str


ANIMALS = [
    Animal("cow", "cows", "big", "brown", "moo", "grass", "on a farm", "calf", "four", "It gives us milk."),
    Animal("cat", "cats", "small", "grey", "meow", "fish", "in a house", "kitten", "four",
    "It likes to sleep in the sun."),
    Animal("dog", "dogs", "small", "brown", "woof", "meat", "in a house", "puppy", "four", "It is a good friend."),
    Animal("duck", "ducks", "small", "white", "quack", "water plants", "by a pond", "duckling", "two",
    "It swims very well."),
    Animal("sheep", "sheep", "small", "white", "baa", "grass", "on a farm", "lamb", "four", "It gives us wool."),
    Animal("pig", "pigs", "big", "pink", "oink", "corn", "on a farm", "piglet", "four", "It likes to roll in the mud."),
    Animal("horse", "horses", "big", "brown", "neigh", "hay", "in a stable", "foal", "four", "It can run very fast."),
    Animal("hen", "hens", "small", "brown", "cluck", "seeds", "in a barn", "chick", "two", "It lays eggs."),
    Animal("lion", "lions", "big", "yellow", "roar", "meat", "on the plain", "cub", "four", "It is very strong."),
    Animal("frog", "frogs", "small", "green", "croak", "flies", "by a pond", "tadpole", "four", "It can jump far."),
    Animal("owl", "owls", "small", "brown", "hoot", "mice", "in a tree", "owlet", "two", "It can see in the dark."),
    Animal("bee", "bees", "small", "yellow and black", "buzz", "nectar", "in a hive", "larva", "six",
    "It makes honey."),
    Animal("mouse", "mice", "small", "grey", "squeak", "cheese", "in a hole", "pup", "four", "It is quick and quiet."),
    Animal("wolf", "wolves", "big", "grey", "howl", "meat", "in the forest", "pup", "four",
    "It lives with its family."),
    Animal("goat", "goats", "small", "white", "maa", "leaves", "on a farm", "kid", "four", "It can climb steep hills."),
    Animal("fox", "foxes", "small", "red", "yip", "berries and mice", "in a den", "cub", "four",
    "It is known to be clever."),
    Animal("bear", "bears", "big", "brown", "growl", "honey and fish", "in a cave", "cub", "four",
    "It sleeps in winter."),
    Animal("rabbit", "rabbits", "small", "white", "squeak", "carrots", "in a burrow", "kit", "four",
    "It has long ears."),
    Animal("squirrel", "squirrels", "small", "red", "chatter", "nuts", "in a tree", "kit", "four",
    "It hides nuts for winter."),
    Animal("elephant", "elephants", "big", "grey", "trumpet", "leaves", "on the plain", "calf", "four",
    "It has a long trunk."),
    Animal("monkey", "monkeys", "small", "brown", "chatter", "bananas", "in the jungle", "infant", "four",
    "It climbs trees."),
    Animal("penguin", "penguins", "small", "black and white", "squawk", "fish", "on the ice", "chick", "two",
    "It cannot fly."),
    Animal("snake", "snakes", "small", "green", "hiss", "mice", "in the grass", "hatchling", "no",
    "It has no legs at all."),
    Animal("spider", "spiders", "small", "black", "nothing", "flies", "in a web", "spiderling", "eight",
    "It spins a web."),
    Animal("whale", "whales", "big", "blue", "a long song", "tiny sea animals", "in the sea", "calf", "no",
    "It breathes air."),
    Animal("fish", "fish", "small", "silver", "nothing", "worms", "in the water", "fry", "no",
    "It breathes under water."),
    Animal("turtle", "turtles", "small", "green", "nothing", "leaves", "by the sea", "hatchling", "four",
    "It has a hard shell."),
    Animal("hedgehog", "hedgehogs", "small", "brown", "snuffle", "worms", "in the garden", "hoglet", "four",
    "It has sharp spines."),
    Animal("giraffe", "giraffes", "big", "yellow", "hum", "leaves", "on the plain", "calf", "four",
    "It has a very long neck."),
    Animal("bird", "birds", "small", "blue", "tweet", "seeds", "in a nest", "chick", "two",
    "It has wings and can fly."),
]  # fmt: skip

HEROES = words(
    "fox rabbit bear mouse cat dog duck hedgehog squirrel frog hen pig goat horse turtle owl lion elephant penguin "
    "monkey sheep cow wolf bird dragon bee snail donkey"
)
PEOPLE = words(
    "knight princess prince king queen farmer pirate wizard robot giant baker sailor dinosaur unicorn astronaut "
    "ghost mermaid witch fairy teacher doctor painter miller shepherd tiger crocodile snowman alien ninja kitten "
    "puppy butterfly whale fish"
)
RARE_HEROES = words(
    "toaster spoon lamp cloud tree shoe car train potato teapot banana clock pencil stone chair broom kettle carrot "
    "balloon star leaf button candle bicycle boat hat flower cookie pumpkin raindrop mountain river book lizard "
    "panda koala zebra kangaroo otter beaver goose crow seal octopus crab shark ant spider camel parrot hamster "
    "raven moose badger soldier detective cowboy viking gardener fisherman postman clown dancer singer cook"
)
HERO_ADJECTIVES = words("little small young brave kind clever shy curious happy gentle quiet friendly")
HERO_TRAITS = [
    "{he} was very [curious|kind|brave|clever|gentle]",
    "{he} loved to [play outside|sing|look at the clouds|tell jokes|draw pictures|ask questions]",
    "everyone [in the village|there|around] liked {him}",
    "{he} had a [warm smile|good heart|big dream|loud laugh]",
]
HOMES = [
    "in a [quiet|deep|green] forest",
    "in a small village",
    "near a [blue|quiet] lake",
    "on a [little|sunny] farm",
    "at the edge of the forest",
    "by a [wide|slow] river",
    "on a green hill",
    "in a [cosy|tiny|little] house",
    "by the sea",
    "in a sunny valley",
]
DAY_TIMES = [
    "one [sunny|warm|bright|windy|cold|rainy] [morning|day|afternoon]",
    "one [morning|day|afternoon|evening]",
    "early one morning",
    "on a [sunny|warm|windy|cold] day",
    "one day in [spring|summer|autumn|winter]",
]
LOST_THINGS = listed(
    "red ball,blue hat,silver key,yellow kite,old map,warm scarf,little bell,wooden boat,gold ring,favourite "
    "book,green umbrella,toy train,small lantern,music box,paint brush"
)
TOYS = listed("red ball,toy train,yellow kite,wooden boat,drum,swing,sled,teddy bear,little cart,puzzle")
HIDING_PLACES = listed(
    "under the bed,behind the door,under a pile of leaves,behind the big tree,in the tall grass,under the old "
    "bridge,inside an empty basket,behind the barn,next to the well,under a bench"
)
FRUITS = listed("apples,pears,plums,cherries,oranges,bananas,grapes,strawberries,lemons,peaches")
VEGETABLES = listed("carrots,potatoes,onions,peas,beans,tomatoes,cabbages,pumpkins,leeks,beets")
DISHES = {
    "apples": "an apple pie", "pears": "a pear tart", "plums": "plum jam", "cherries": "a cherry cake",
    "lemons": "cold lemonade", "peaches": "a peach cake", "strawberries": "strawberry jam", "carrots": "carrot soup",
    "potatoes": "potato soup", "onions": "onion soup", "tomatoes": "tomato soup", "pumpkins": "pumpkin soup",
    "eggs": "a big omelette", "flour": "fresh bread", "milk": "a sweet pudding",
}  # fmt: skip
SKILLS = {
    "swim": "in the lake", "dance": "in the garden", "sing": "by the window", "read": "under a tree",
    "whistle": "on the hill", "paint": "in the garden", "skate": "on the ice", "ride a bike": "in the park",
    "juggle": "in the yard", "play the drum": "in the barn", "play the flute": "on the hill",
    "bake bread": "in the kitchen",
}  # fmt: skip
BUILDS = {
    "boat": "wood", "tree house": "wood", "bridge": "stones", "sand castle": "sand", "snowman": "snow",
    "little house": "bricks", "raft": "old boards", "bird house": "wood", "stone wall": "stones", "tent": "cloth",
    "wooden cart": "boards",
}  # fmt: skip
GIFTS = [
    "a warm scarf", "a honey cake", "a painted stone", "a bunch of flowers", "a wooden spoon", "a little song",
    "a basket of berries", "a paper star", "a pair of mittens", "a string of beads", "a jar of jam", "a card",
]  # fmt: skip
PLANTS = {
    "sunflower": "tall and yellow", "pumpkin": "round and orange", "rose": "red and sweet",
    "apple tree": "strong and green", "tulip": "bright and red", "bean plant": "tall and green",
    "lily": "white and lovely", "carrot": "long and orange",
}  # fmt: skip
NIGHT_ANIMALS = listed("mouse,hedgehog,kitten,frog,owl,squirrel,puppy,rabbit")
TREASURES = [
    "a chest full of [apples|old books|shiny stones|sweet cakes|toys]",
    "a box of [silver bells|bright beads|gold coins]", "a hidden garden with a hundred flowers",
    "a cave full of crystals",
]  # fmt: skip
CHORES = listed("sweep the floor,carry the water,feed the hens,pick the beans,wash the dishes,chop the wood")

COLOURS = listed("red,blue,green,yellow,orange,purple,pink,brown,black,white,grey")
COLOURED = {
    "sky": "blue", "grass": "green", "snow": "white", "sun": "yellow", "sea": "blue", "coal": "black",
    "chocolate": "brown", "blood": "red", "milk": "white", "night": "black", "salt": "white", "honey": "golden",
    "moon": "white",
}  # fmt: skip
COLOURED_THINGS = {
    "banana": "yellow", "lemon": "yellow", "carrot": "orange", "orange": "orange", "tomato": "red", "strawberry": "red",
    "plum": "purple", "leaf": "green", "frog": "green", "pig": "pink", "cherry": "red", "pumpkin": "orange",
    "mouse": "grey", "fire engine": "red", "cloud": "white", "pea": "green", "elephant": "grey", "bear": "brown",
    "swan": "white",
}  # fmt: skip
OPPOSITES = [
    ("big", "small"), ("hot", "cold"), ("up", "down"), ("day", "night"), ("fast", "slow"), ("happy", "sad"),
    ("old", "young"), ("long", "short"), ("light", "dark"), ("wet", "dry"), ("open", "closed"), ("full", "empty"),
    ("hard", "soft"), ("loud", "quiet"), ("clean", "dirty"), ("early", "late"), ("near", "far"), ("strong", "weak"),
    ("rich", "poor"), ("high", "low"), ("left", "right"), ("good", "bad"), ("sweet", "sour"), ("in", "out"),
    ("yes", "no"), ("thick", "thin"), ("first", "last"), ("true", "false"), ("heavy", "light"), ("black", "white"),
]  # fmt: skip
PLURALS = {
    "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "man": "men", "woman": "women",
    "goose": "geese", "sheep": "sheep", "leaf": "leaves", "wolf": "wolves", "cat": "cats", "dog": "dogs",
    "fox": "foxes", "box": "boxes", "city": "cities", "baby": "babies", "house": "houses", "tree": "trees",
    "book": "books", "berry": "berries", "knife": "knives", "fish": "fish", "bus": "buses", "apple": "apples",
    "star": "stars", "person": "people",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "England": "London", "Japan": "Tokyo",
    "China": "Beijing", "Egypt": "Cairo", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm",
    "Portugal": "Lisbon", "Austria": "Vienna", "Poland": "Warsaw", "Ireland": "Dublin", "India": "New Delhi",
    "Canada": "Ottawa", "Peru": "Lima", "Denmark": "Copenhagen", "Finland": "Helsinki", "Switzerland": "Bern",
    "Russia": "Moscow", "Kenya": "Nairobi", "Brazil": "Brasilia", "Mexico": "Mexico City", "Australia": "Canberra",
    "the United States": "Washington", "the Netherlands": "Amsterdam", "Belgium": "Brussels", "Turkey": "Ankara",
    "South Korea": "Seoul", "Hungary": "Budapest",
}  # fmt: skip
CITY_NOTES = [
    "{city} is a [large|busy|lively] city with many [old streets|shops|parks|visitors].",
    "many people [live|work] in {city}.",
    "people from all over the world like to visit {city}.",
    "{city} is [known for|full of] its [museums|parks|markets|music].",
]
RHYMES = {
    "cat": "hat", "tree": "bee", "moon": "spoon", "star": "car", "house": "mouse", "light": "night", "ring": "king",
    "fish": "dish", "boat": "goat", "book": "cook", "rain": "train", "bear": "chair", "day": "play", "sun": "run",
    "snow": "grow", "frog": "dog", "cake": "lake", "bell": "well", "fox": "box", "sand": "hand", "sky": "fly",
    "hen": "ten", "blue": "shoe", "green": "queen", "red": "bed",
}  # fmt: skip
DAYS = listed("Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday")
MONTHS = listed("January,February,March,April,May,June,July,August,September,October,November,December")
SEASONS = {
    "spring": "In spring the days grow warm and the first flowers open.",
    "summer": "In summer the sun is hot and the days are long.",
    "autumn": "In autumn the leaves turn red and fall from the trees.",
    "winter": "In winter it is cold and snow may cover the ground.",
}
LISTS = {
    "fruits": FRUITS,
    "vegetables": VEGETABLES,
    "colours": COLOURS,
    "animals": listed("cats,dogs,horses,foxes,bears,rabbits,lions,elephants,wolves,mice"),
    "farm animals": listed("cows,pigs,sheep,hens,goats,horses,ducks,donkeys"),
    "birds": listed("robins,owls,ducks,swans,penguins,eagles,crows,geese"),
    "toys": listed("balls,kites,dolls,puzzles,drums,toy trains,teddy bears,blocks"),
    "tools": listed("hammers,saws,spades,ladders,brushes,nails,axes,ropes"),
    "clothes": listed("hats,coats,shirts,socks,shoes,scarves,gloves,dresses"),
    "drinks": listed("water,milk,tea,coffee,lemonade,apple juice"),
    "foods": listed("bread,cheese,soup,rice,eggs,fish,honey,cake"),
    "flowers": listed("roses,tulips,daisies,lilies,sunflowers,violets"),
    "trees": listed("oaks,pines,maples,willows,birches,apple trees"),
    "days": DAYS,
    "months": MONTHS,
    "seasons": list(SEASONS),
    "planets": listed("Mercury,Venus,Earth,Mars,Jupiter,Saturn,Uranus,Neptune"),
    "instruments": listed("drums,flutes,pianos,violins,guitars,trumpets,bells"),
    "sports": listed("running,swimming,football,tennis,skating,cycling"),
    "shapes": listed("circles,squares,triangles,stars,rectangles,hearts"),
    "countries": [country for country in CAPITALS if not country.startswith("the ")][:14],
    "cities": [city for country, city in CAPITALS.items() if not country.startswith("the ")][:14],
    "insects": listed("bees,ants,flies,butterflies,beetles,moths"),
    "numbers": listed("one,two,three,four,five,six,seven,eight,nine,ten"),
}
LANGUAGES = {
    "French": {"hello": "bonjour", "thank you": "merci", "goodbye": "au revoir", "yes": "oui", "no": "non",
    "cat": "chat"},
    "Spanish": {"hello": "hola", "thank you": "gracias", "goodbye": "adios", "yes": "si", "no": "no", "cat": "gato"},
    "German": {"hello": "hallo", "thank you": "danke", "goodbye": "auf Wiedersehen", "yes": "ja", "no": "nein",
    "cat": "Katze"},
    "Italian": {"hello": "ciao", "thank you": "grazie", "goodbye": "arrivederci", "yes": "si", "no": "no",
    "cat": "gatto"},
}  # fmt: skip
# Small and big things, slow and fast ones, and how they compare.
OPPOSED = [
    (listed("ant,bee,mouse,frog,fly,snail"), listed("horse,elephant,whale,mountain,house,bear"), "smaller", "bigger"),
    (listed("snail,turtle,worm,hen,duck"), listed("horse,car,train,plane,rocket"), "slower", "faster"),
]
